"""The page that shows a run: one HTML file without a network, for a browser.

Python makes the data (compressed JSON); the files in `static/` are the page's HTML, CSS and
JavaScript.
"""
