"""Records and trials that persist, and who may tune a problem meanwhile."""
