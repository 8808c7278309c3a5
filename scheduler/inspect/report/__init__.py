"""Reports a cache as one HTML file that explains each record: `page.page` writes the data that `content.gather` collects."""
