"""Runs of programs that were not written for skypool: a script, a module or a command, with its project.

- `target`: what is run, as words of a command line.
- `node_folders`: where a node keeps projects and environments.
- `environment`: makes the Python environment of a project on a node.
- `unsaved_files`: finds what a program has written elsewhere.
- `node_program`: runs the program on a node, and writes its output to files there.
- `output_files`: the format of these files. `follow_end` sends them from a node, and `follow` reads them here.
- `output_spool`: keeps output here until it is shown.
- `secret_values`: finds secrets by their names.
- `program_run`: puts these together for the nodes of a pool.
- `own_thread`: runs a function in a thread of its own.
- `saver`: fetches the folder that the program writes.
- `save_places`: finds the buckets in which folders of a run are kept.
- `rank_lines`: marks the lines of several processes.
- `teller`: tells the user what happens.
- `lingering`: finds machines that an earlier run has left.
- `whole_run`: all of it, from the checks before renting to the end of the machines. `skypool run` calls this.
- `run`: `skypool.run`, the same from Python.

A run that is handed over to its machine, by the state machines of `head`:

- `needs`: all that a runner needs, which travels to the machine.
- `handing_over`: the client's side of the hand-over. `owned_machine` is what it acts on.
- `runner`: the process on the machine that owns the run there. The agent starts it.
- `machine_look`: looks what is there of a run on its machine.
- `reaching`: finds the way to the machine of a run. `looking`: looks in at a run there, through lost connections.
  `look_end`: sends what the machine has.
- `packed_call`: packs a call for its machine. `call_program` runs it there. `call_results`: fetches its value.
- `detached_run`: `DetachedRun`, what `sky.run(…, detach=True)` and `sky.Run.get` return.
- `watched_run`: shows such a run in the terminal that has started it, and ends its machine.
- `machine_end`: ends the machine of a run from another process, and proves it.
- `observing`: observes a run there: its node, what its processes do, and its history. `ask_end` asks its runner, and
  `history_end` sends the history.
- `cancelling`: cancels a run through its agent. `agent_door`: talks to that on the machine.
- `asking`: asks machines how their runs stand. `ends_here` looks for runs on this computer, and `end_in_bucket` reads
  the end of one whose machine is gone. `noting` records what was found.
- `end_hook`: posts how a run has ended to a webhook, from its machine or from here.
- `stored`: the run's folder on its machine, and the file there that says how the run has ended.

The root of a project is its folder here. Its copy is its folder on a node.
"""

__all__ = [
    "agent_door",
    "ask_end",
    "asking",
    "call_program",
    "call_results",
    "cancelling",
    "detached_run",
    "end_hook",
    "end_in_bucket",
    "ends_here",
    "environment",
    "follow",
    "follow_end",
    "handing_over",
    "history_end",
    "lingering",
    "look_end",
    "looking",
    "machine_end",
    "machine_look",
    "needs",
    "node_folders",
    "node_program",
    "noting",
    "observing",
    "output_files",
    "output_spool",
    "own_thread",
    "owned_machine",
    "packed_call",
    "program_run",
    "rank_lines",
    "reaching",
    "run",
    "runner",
    "save_places",
    "saver",
    "secret_values",
    "stored",
    "target",
    "teller",
    "unsaved_files",
    "watched_run",
    "whole_run",
]
