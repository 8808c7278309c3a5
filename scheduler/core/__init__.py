"""Values and tables shared by all other packages; independent of cost models, devices, databases and searches."""
