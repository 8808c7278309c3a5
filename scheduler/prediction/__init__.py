"""An answer without measuring, from the model and from records of similar problems."""
