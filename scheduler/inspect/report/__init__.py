"""Reports a cache as one HTML file that explains each record: `page.page` writes what `content.gather` collects."""
