"""The dashboard at work: screenshots for the documentation, and how fast the page is with a large log."""
