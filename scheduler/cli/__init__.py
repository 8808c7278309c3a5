"""The command line: commands parse and call, rendering prints."""
