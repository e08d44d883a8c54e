"""Faults on purpose, over real processes, and a checker that computes what had to happen.

`python -m tests.chaos --help` says how to run it. The rooms: `plan` (a seed's faults), `schedule` (what the beats
send), `tasks` (what the workers do; runs in them), `fleet` (servers, beats, workers, and the links between
them), `tap` (what reaches the broker), `nemesis` (does the plan's faults and ends them), `collect` (brings what
was seen into one `history`), `checker` (judges it), `draw` (shows it).
"""
