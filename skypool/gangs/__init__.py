"""Gangs: calls that run as processes on all their nodes, and that start, fail and run again as a whole.

`states` has the values of a pure state machine: events, actions and the state in between.
`network` has the report of the network check among nodes, and `probe` the function that nodes run for it.
"""
