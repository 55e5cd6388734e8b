"""Tasks that a user can start: each tells which tools answer it, and in what order."""

from __future__ import annotations


def review_training_run(recording: str) -> str:
    """Review one recording: what limits the job, the evidence, and what to change first."""
    return (
        f"Review the training run recorded in {recording!r} with the PerfScope tools.\n"
        "1. Call summary. Quote its headline and the step time; read its notes, which limit the numbers.\n"
        "2. Call findings. For the two that are worth most, give the evidence, what to change and the predicted step "
        "time. Never add up savings: predict several changes together with what_if.\n"
        "3. Where ranks wait for one another, call stragglers: name the rank that is late and its cause, not those "
        "that wait.\n"
        "4. Say what to change first, what it brings, and how certain that is. Say what the recording cannot show."
    )


def compare_two_runs(baseline: str, candidate: str) -> str:
    """Judge a change: did it help, by how much, and why."""
    return (
        f"Compare the recordings {baseline!r} (before) and {candidate!r} (after) with the PerfScope tools.\n"
        "1. Call compare. Quote the verdict and the range of the difference; a difference within noise is none.\n"
        "2. Name the causes; for the largest, call compare again with part=kernels, collectives, operators or ranks.\n"
        "3. Call compare with part=settings to see what differed besides, and with part=predictions for what was "
        "predicted.\n"
        "4. Say whether the change helped, by how much, and what to do next."
    )


def explain_hang(recording: str) -> str:
    """Explain why a job stands still."""
    return (
        f"The job recorded in {recording!r} stands still. Find out why with the PerfScope tools.\n"
        "1. Call hang: name the ranks that did not join, the operation, and how certain that is.\n"
        "2. Call hang with part=call_sites to see where in the code these ranks stand, and part=mismatches for "
        "collectives that were not issued alike.\n"
        "3. Say what to look at in the code, and what to record next time where the data does not show the cause."
    )


PROMPTS = (review_training_run, compare_two_runs, explain_hang)
