"""Collectives as NCCL Inspector logged them: a rank's kernel time of each, without a trace."""

from __future__ import annotations

from typing import Annotated

from perfscope.frozen import dataclass
from perfscope.results.fields import Bytes, Count, GBps, Share, Us


@dataclass(frozen=True, kw_only=True)
class InspectorRow:
    """Logged operations of one communicator, kind and size."""

    group: Annotated[str, "The communicator's name, else its hash."]
    ranks: Annotated[tuple[int, ...], "Ranks that logged it; ranks of the communicator where global ones are unknown."]
    size: Annotated[int, "Ranks of the communicator."]
    nodes: Annotated[int, "Hosts of the communicator."]
    kind: str
    bytes: Annotated[Bytes, "Size of one operation, as nccl-tests counts it: of gathers and scatters over all ranks."]
    count: Annotated[Count, "Operations that any rank logged."]
    matched: Annotated[Count, "Operations that all ranks of the communicator logged."]
    transfer_us: Annotated[
        Us,
        "Mean over matched operations of the shortest kernel of any rank: the last rank to arrive waits for none. "
        "Without matched ones the shortest kernel of all, and of sends and recvs their own.",
    ]
    wait_us: Annotated[
        Us | None,
        "Mean over matched operations and ranks of the rank's kernel − the shortest one; None without matched ones.",
    ]
    longest_us: Annotated[Us, "The longest kernel of any rank."]
    algbw_gbps: Annotated[GBps | None, "Bytes / transfer, GB/s (10⁹ bytes per second)."]
    busbw_gbps: Annotated[GBps | None, "Bus bandwidth by the convention of nccl-tests."]
    last_arriver: Annotated[dict[int, Share], "Rank -> share of matched operations in which its kernel was shortest."]
    algorithm: Annotated[str, "NCCL's algorithm; empty where the plugin does not log it, several by commas."] = ""
    protocol: Annotated[str, "NCCL's protocol; empty where the plugin does not log it, several by commas."] = ""
    channels: Annotated[int | None, "Channels of the kernel; None where not logged."] = None
    timing: Annotated[str, "Clock of the times: ``kernel_gpu``; ``kernel_cpu`` and ``collective_cpu`` are less exact."]
