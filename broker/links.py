"""ZeroMQ between gateways and workers: the door to the two kinds of traffic.

- Notices (`broker/notices.py`): a question and its answer, repeated until answered; loss is survivable.
- Token deltas (`broker/deltas.py`): a numbered link per pair of processes; nothing is lost or doubled.

Each process has one `NoticeInbox`. A gateway's receives Admit, Failed, PromptLogprobs and Deltas (which it hands to its
`DeltaReceiver`); a worker's receives KvReady, Reserve, Start, Room and Cancel. Everybody asks through `NoticePeers`; D
pushes tokens through its `DeltaSender`.
"""

from __future__ import annotations

from broker.delta_receiver import DeltaReceiver, WorkerPulse
from broker.deltas import DeltaSender, DeltaSettings
from broker.notices import NOTICES, NoticeInbox, NoticePeers, NoticeReply, NoticeSettings

__all__ = [
    "NOTICES",
    "NoticeSettings",
    "NoticeInbox",
    "NoticePeers",
    "NoticeReply",
    "DeltaSettings",
    "DeltaSender",
    "DeltaReceiver",
    "WorkerPulse",
]
