"""Values and tables that every other part speaks of; knows nothing of models, devices in use, databases or searches."""
