"""Problems of a job searched on other hosts: what travels, what runs there, and Ray, which carries it."""
