"""Reports: what a pool did and cost, as one HTML file that loads nothing from the network.

- `report`: `Report`, which can be saved or shown in a notebook, and the functions that make one.
- `facts`: reads the stored data of a pool: its record in the ledger, its samples and its history.
- `page`: builds the HTML page; `style.css` has its colours and its layout.
- `overview`, `timeline`, `devices`, `calls`, `folders`, `money`, `problems`: the sections of the page.
- `elements`: elements of HTML and SVG, which escape their texts; `page_parts`: tables, sections and lists made of them.
- `history`: writes to disk, while a pool runs, what a report is made of.
- `widget`: the live display of a pool in a notebook.
- `words`: formats times, numbers and amounts. A value that is not known is "unknown".

A node is a rented machine. The ledger is the local database of nodes and their costs. A pool's receipt is the pool's
part of the ledger.
"""

__all__ = [
    "calls",
    "devices",
    "elements",
    "facts",
    "folders",
    "history",
    "money",
    "overview",
    "page",
    "page_parts",
    "problems",
    "report",
    "timeline",
    "widget",
    "words",
]
