"""Searches the problems of a job on other hosts: messages, agents, and the transport by Ray."""
