"""Reports: what a pool did and cost, as one HTML file that loads nothing from the network.

- `report`: `Report`, which can be saved or shown in a notebook, and the functions that make one.
- `facts`: reads what is kept of a pool: its record in the ledger, its samples and its history.
- `page`: puts the page together; `style.css` has its colours and its layout.
- `overview`, `timeline`, `devices`, `calls`, `money`, `problems`: the sections of the page.
- `elements`: the elements of HTML and SVG, whose texts are escaped; `tables`: tables and figures made of them.
- `widget`: the live picture of a pool in a notebook.
- `words`: times, numbers and amounts as text. A value that is not known is "unknown".
"""

__all__ = [
    "calls",
    "devices",
    "elements",
    "facts",
    "money",
    "overview",
    "page",
    "problems",
    "report",
    "tables",
    "timeline",
    "widget",
    "words",
]
