"""The hand-over of a run from the client that rented its machine to a runner on that machine.

- head: the machine of a run that belongs to itself, not to the process that started it.
- runner: the process on the head that owns the run. It is skypool's client code without an account of a provider.
- hand-over: the change of the owner from the client to the runner. It is committed, or it has not happened.
- former client: the client, after the commit. It may only watch, and ask the runner to cancel the run.
- claim: the run and its generation. Each machine that gets a run of this name is a generation, counted from 1.
- row: a small file on the head. It is written once, with fsync; this is the commit.
- heir: a secret word by which the agent knows the runner. The runner gets it after the commit.
- end: the time at which the guard ends the machine in any case. It is agreed before the commit, and only comes nearer.
- attempt: the number of one start of the program, counted from 1. Each one after the first is a retry.

The hand-over has six steps:

1. The client writes "detaching" into the ledger, and renews the tags of the machine until the written end.
2. The agent starts the runner, which gets all that it needs, and says that it stands by.
3. The guard takes the end and the heir. The lease stays as it is, so a client that dies now leaves no machine behind.
4. The agent writes the row.
5. The agent gives the runner the heir and takes it as the owner, and refuses the former client. The program starts.
6. The client writes "detached" into the ledger, and returns or watches.

A run whose terminal stays open is handed over, too: its client watches, and Ctrl-C has the runner cancel the run.

For later: a run that goes on elsewhere has the same name and a higher generation. Messages of its old machine are then
not taken for those of the new one. On several nodes, the agents of the others are told the heir's digest before the
commit. The runner gets the heir itself only after it, so whoever shows the heir proves the commit.

- `states`: the values of the three state machines: states, events, actions and messages.
- `steps`: the state machines themselves: client, agent and runner. They use no clock and do no input or output.
- `messages`: the messages as JSON.
- `rows`: the row as a file.
"""

__all__ = ["messages", "rows", "states", "steps"]
