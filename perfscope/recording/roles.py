"""Roles in names: which part of a reinforcement-learning job wrote a file or a folder; opening none.

A job of several roles has programs beside its training that are no ranks of it: processes that generate, that judge,
that compute log-probabilities of a reference. Frameworks write the role into names::

    actor_update/prof_rank-0.json.gz  ref_compute_log_prob/prof_rank-0.json.gz           verl, discrete
    actor_update/actor_actor_update_rank0-of-8_tp0-pp0-dp0_pid7_20260113101500123.json.gz    verl, newer
    e2e/…  agent_loop_rollout_replica_0/…  rollout_step_5/…                              verl and its servers
    train_actor_rank_0.1718….pt.trace.json.gz  train_log_probs_rank_0.1718….pt.trace.json.gz   slime
    actor_node7_worker_process_4242.nsys-rep                                             verl, Nsight Systems
    dtensor_policy_worker_0.nsys-rep  vllm_generation_worker_0.nsys-rep                  NeMo RL

Names only decide which files to read together; whether roles run side by side or in turns shows in their times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from perfscope.grouping import grouped

_Value = TypeVar("_Value")

UPDATE: Final = "update"
"""The role that trains: in a folder of several the one that is analyzed in full."""

KINDS: Final = {
    "reference": ("ref", "reference", "teacher", "log_prob", "log_probs", "logprob", "logprobs"),
    "critic": ("critic", "value", "values"),
    "reward": ("reward", "rewards", "rm", "judge", "verifier", "scorer"),
    "rollout": (
        "rollout", "rollouts", "generate", "generation", "generator", "sampler", "vllm", "sglang", "inference",
        "explorer", "env", "simulator", "agent",
    ),
    UPDATE: ("update", "learner", "train", "trainer", "training", "actor", "policy", "student", "e2e"),
}  # fmt: skip
"""Kind of role -> words that name it. Of several the first kind counts: ``actor_compute_log_prob`` updates nothing."""

_WORDS: Final = frozenset(part for words in KINDS.values() for word in words for part in word.split("_")) - {"log"}
_MODIFIERS: Final = frozenset({"model", "overall", "compute", "log", "loop", "server", "engine"})
"""Words that belong to a role's name where they stand beside one of its words."""
_ENDING: Final = re.compile(
    r"(?:\.pt)?(?:\.trace)?\.(?:json|nsys-rep|qdrep|sqlite)(?:\.\w+)?$|_pqtdir$|\.(?:zip|gz|zst)$", re.IGNORECASE
)
_STEP: Final = re.compile(r"(?:step|steps|iter|iteration|epoch|cycle)[-_.]?\d+", re.IGNORECASE)
_PARTS: Final = re.compile(r"(?<![A-Za-z])e2e(?![A-Za-z])|[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+")


def role_in_name(name: str) -> str:
    """The role that a file's or folder's name states: ``actor_update``; empty where it states none."""
    words = [word.lower() for word in _PARTS.findall(_ENDING.sub("", name))]
    known = [place for place, word in enumerate(words) if word in _WORDS]
    if not known:
        return ""
    first, last = known[0], known[0]
    while first and words[first - 1] in _MODIFIERS:
        first -= 1
    while last + 1 < len(words) and words[last + 1] in _WORDS | _MODIFIERS:
        last += 1
    found = words[first : last + 1]
    if len(found) > 1 and found[0] == found[1]:  # verl's prefix, then the role: actor_actor_update
        found = found[1:]
    return "_".join(found)


def kind_of_role(role: str) -> str:
    """The kind of a role by its name, one of :data:`KINDS`; ``other`` where its words name none."""
    text = f"_{'_'.join(word.lower() for word in _PARTS.findall(role))}_"
    for kind, words in KINDS.items():
        if any(f"_{word}_" in text for word in words):
            return kind
    return "other"


def main_role(roles: Iterable[str]) -> str:
    """Of several roles the one that trains, else the first: that is the one to be analyzed in full."""
    order = (UPDATE, "critic", "other", "reference", "reward", "rollout")
    return min(roles, key=lambda role: order.index(kind_of_role(role)))


def roles_of_files(files: Sequence[Path]) -> dict[str, list[Path]] | None:
    """The files of one folder by role; None where their names do not state two roles at least."""
    return _several((role_in_name(path.name), path) for path in files)


def roles_of_folders(folders: Iterable[str]) -> dict[str, list[str]] | None:
    """Names of sub-folders by role; None where they do not state two roles at least.

    Folders whose names state none stand by themselves.
    """
    return _several((role_in_name(name), name) for name in folders)


def instances(names: Sequence[str]) -> list[list[str]]:
    """Folders of one role: those that differ by more than the number of a step are instances (replicas) of it."""
    return list(grouped((_STEP.sub("#", name), name) for name in names).values())


def _several(named: Iterable[tuple[str, _Value]]) -> dict[str, list[_Value]] | None:
    found = grouped(named)
    return found if sum(map(bool, found)) > 1 else None
