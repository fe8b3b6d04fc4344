"""The page that shows a run: one HTML file without a network, for a browser.

Python makes the data (compressed JSON); the files in `static/` are the page's HTML, CSS and
JavaScript.
"""

from grpo_core.rollouts.page.token_texts import TokenTexts
from grpo_core.rollouts.page.write import write_page

__all__ = ["TokenTexts", "write_page"]
