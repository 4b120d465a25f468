"""What the engine tells: events, recordings of them, and states replayed from recordings.

event.py      what an event is, and the ReplayState that events move on
events.py     every kind of event, each with all that is known about it
fleet_events.py  the kinds that are told of a stream of other servers
draft_events.py  the kinds that an engine with drafts tells beside
disk_events.py  the kinds that a tree with a disk tier tells beside
rank_events.py  the kinds that an engine of several ranks tells beside
route_events.py  the kinds that a router tells beside such a stream
bus.py        carries events to handlers
snapshot.py   the state of an engine or a tree as plain data
describe.py   a tree's nodes as plain data
check.py      every invariant, recomputed
recorder.py   takes events as they come, into frames
silent.py     events for a tree that tells none
recording.py  frames in memory or in a file, replayable to any moment
replay.py     frames and keyframes
reading.py    lines of a file from a stranger
kv_events.py  the tree's story in blocks, as routers are told it
"""
