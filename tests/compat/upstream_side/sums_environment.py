"""The environment of docs/tutorials/atropos-environment.md, whose log names time and level.

Knows nothing of this project. Run by the interpreter that has atroposlib.
"""

import logging
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/tutorials/atropos-environment.md"
(CODE,) = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())

logging.basicConfig(level=logging.INFO, format="%(created).3f %(levelname)s %(message)s")
exec(CODE)
