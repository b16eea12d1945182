"""Terminal output of a pool: what functions print, and skypool's own lines or live view about the pool.

    python script.py > out.txt      # out.txt has what functions print on stdout; skypool's own lines go to stderr

A pool is a set of rented machines, its nodes, on which functions run. The library rich is loaded only when a live view
is drawn, because that takes time. Everything else needs only the standard library.

- `mode`: decides whether there is a live view, or lines.
- `plain`: lines for files, pipes and CI; `live`: the live view for terminals.
- `event_text`: turns events into lines of text; `board`: turns events into the state that a live view shows.
- `layout`: layout of the live view; `gauges`: its small bars of what nodes measure.
- `live_screen`: draws the view on the terminal, in a thread of its own.
- `printer`: prints functions' output, marked with the node; `whole_lines`: cuts streams of text into whole lines.
- `nonblocking_writer`: writes to the user's stdout and stderr without blocking the caller for long.

Words of this package:

- device: an accelerator. Slot: a place on a node where one call runs at a time. A CPU slot has no device.
- mark: the text before each printed line that says where it comes from, such as "[0.1]" for slot 1 of node 0.
- gang: one call that runs as several processes, its ranks. Service: a long-running process on a node.
- unfinished line: text that has no newline yet, such as a progress bar.
"""

from skypool.console.mode import Mode, attach, drawable

__all__ = ["Mode", "attach", "drawable"]
