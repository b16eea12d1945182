"""The full-screen view of `skypool top`, with the library textual. Only the command imports this module."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from skypool.cli.top_lines import ORDERS, Order, details, ordered, pool_lines, summary
from skypool.cli.top_survey import PoolView, Survey

_REDRAWN_EVERY = 0.5
"""Seconds between two drawings of the view. The owners of pools are asked once a second."""
_CHOSEN = "> "
_OTHERS = "  "

HELP = """[b]up, down[/b]  choose a pool, or scroll its nodes
[b]enter[/b]     show only the chosen pool
[b]escape[/b]    show all pools again
[b]s[/b]         order by start, name, rate, spent, idle
[b]q[/b]         quit; pools go on

[b]left 9:35[/b] the process of the pool is gone, and its
          lease is over in 9:35 minutes
[b]no answer[/b] the process is stopped or busy
[b]idle[/b]      cost of the time in which no call ran,
          or all devices were under 5 %
[b]GPU ▂▅█[/b]   a bar for each device, and the mean
[b]mem[/b]       used and whole memory of all devices
[b]claimed[/b]   the machine is not trusted, and its
          owner says so
[b]?[/b]         not known"""


class Help(ModalScreen[None]):
    """The help, over the view. Any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "Close")]
    CSS = "Help { align: center middle; } Help Static { width: 56; height: auto; border: round $accent; padding: 0 1; }"

    def compose(self) -> ComposeResult:
        """Yield the text of the help."""
        yield Static(HELP)


class Top(App[None]):
    """The application: all pools of this user, with the nodes of the chosen one.

    Args:
        survey: asks for the pools. The application starts and stops it.
        alone: True shows only the chosen pool at first, as `skypool top POOL` does.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "skypool top"
    CSS = """
    Screen { layout: vertical; }
    #summary, #headings { height: 1; text-wrap: nowrap; }
    #pools { height: auto; max-height: 40%; scrollbar-size-vertical: 1; }
    #details { height: 1fr; margin-top: 1; scrollbar-size-vertical: 1; }
    #details Static { text-wrap: nowrap; text-overflow: ellipsis; }
    .alone #headings, .alone #pools { display: none; }
    .alone #details { margin-top: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("enter", "open", "Only this pool", priority=True),  # otherwise the list of pools would take the key
        Binding("escape", "close", "All pools"),
        Binding("s", "sort", "Sort"),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]

    def __init__(self, survey: Survey, alone: bool = False) -> None:
        super().__init__()
        self._survey = survey
        self._is_alone = alone
        self._order: Order = "start"
        self._shown: list[PoolView] = []

    def compose(self) -> ComposeResult:
        """Yield the parts of the view from the top to the bottom."""
        yield Static(id="summary")
        yield Static(id="headings")
        yield OptionList(id="pools", compact=True)
        with VerticalScroll(id="details"):
            yield Static(id="nodes")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Start `survey`, which asks for the pools again and again, and start to draw."""
        self._survey.start()
        self.set_interval(_REDRAWN_EVERY, self.draw)
        self._show_alone(self._is_alone)
        self.draw()

    def on_unmount(self) -> None:
        """Stop `survey`, so that no pool is asked any more."""
        self._survey.stop()

    def on_resize(self, event: Resize) -> None:
        """Draw at once in the new size."""
        self.draw()

    # --- drawing ---------------------------------------------------------------------------------------------

    @property
    def chosen(self) -> PoolView | None:
        """The pool whose nodes are shown; None if there is no pool."""
        at = self._pools.highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    @property
    def _pools(self) -> OptionList:
        return self.query_one("#pools", OptionList)

    def draw(self) -> None:
        """Draw the pools as they are known now."""
        if not self._survey.is_read.is_set():
            self._set("#summary", Text("skypool top"))
            return
        views = ordered(self._survey.views(), self._order)
        self._set("#summary", summary(views, self._survey.trouble).append(f"  by {self._order}", "bright_black"))
        self._draw_pools(views)
        self._draw_details()

    def _draw_pools(self, views: list[PoolView]) -> None:
        chosen = self.chosen
        sessions = [view.session for view in views]
        pools = self._pools
        if sessions != [view.session for view in self._shown]:
            self._shown = views
            pools.set_options([Option("", id=each) for each in sessions])
            pools.highlighted = sessions.index(chosen.session) if chosen and chosen.session in sessions else 0
        self._shown = views
        self._draw_rows()

    def _draw_rows(self) -> None:
        """Draw the row of each pool. The chosen pool has a mark, because its colour alone may not be seen."""
        pools = self._pools
        width = self.size.width - len(_CHOSEN) - 1
        headings, lines = pool_lines(self._shown, time.time(), width)
        self._set("#headings", Text(_OTHERS) + headings)
        for n, line in enumerate(lines):
            pools.replace_option_prompt_at_index(n, Text(_CHOSEN if n == pools.highlighted else _OTHERS) + line)

    def _draw_details(self) -> None:
        view = self.chosen
        if view is None:
            text = Text(
                "no pool of this computer is running; `skypool gc` asks the providers for machines of other pools"
            )
        else:
            text = Text("\n").join(details(view, time.time(), self.size.width - 1))
        self._set("#nodes", text)

    def _set(self, name: str, text: Text) -> None:
        self.query_one(name, Static).update(text)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the nodes of the pool that has just been chosen."""
        if event.option_index < len(self._shown):
            self._draw_rows()
            self._draw_details()

    # --- keys ------------------------------------------------------------------------------------------------

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Show only the pool that was clicked."""
        self._show_alone(True)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return False for an action that would change nothing now, so that the footer does not show its key."""
        if action not in ("open", "close"):
            return True
        return len(self.screen_stack) == 1 and self._is_alone == (action == "close")

    def action_open(self) -> None:
        """Show only the chosen pool."""
        self._show_alone(True)

    def action_close(self) -> None:
        """Show all pools again."""
        self._show_alone(False)

    def _show_alone(self, alone: bool) -> None:
        self._is_alone = alone
        self.screen.set_class(alone, "alone")
        self.refresh_bindings()
        self.query_one("#details" if alone else "#pools").focus()

    def action_sort(self) -> None:
        """Sort the pools by the next criterion in `ORDERS`, such as "name"."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self.draw()

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help())
