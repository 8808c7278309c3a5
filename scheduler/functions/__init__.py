"""A user's whole function: the problems it poses, faster products in it, a plan to deploy it."""
