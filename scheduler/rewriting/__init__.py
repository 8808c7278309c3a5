"""Tunes a whole function: lists its problems, replaces products by faster kernels, and makes a plan to deploy."""
