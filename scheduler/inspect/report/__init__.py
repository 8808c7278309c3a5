"""A cache as one HTML file that explains each of its records: `page.page` writes it, from what `gather` found."""
