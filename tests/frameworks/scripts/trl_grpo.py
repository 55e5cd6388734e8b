"""TRL's GRPO with its reward in a process of its own, which judges over HTTP, as reward servers do.

The learner asks for a capture of both at the same time (perfscope trigger --seconds), and trains until it is there.
Each process writes what it did by its own clock: when the judge worked, when the learner waited for it.
"""

import argparse
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import datasets  # before torch, as many programs do
import torch

import perfscope


def judge(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model, log = torch.nn.Linear(64, 64), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            begin = time.time_ns()
            with torch.no_grad(), torch.profiler.record_function("compute_reward"):
                while time.time_ns() < begin + args.judge * 1e9:
                    model(torch.randn(64, 64))
            log.append((begin, time.time_ns()))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([float(len(set(text.split()))) for text in texts]).encode())
            perfscope.step()

        def do_GET(self) -> None:
            """The end."""
            Path(args.log, "reward.json").write_text(json.dumps(log))
            self.send_response(200)
            self.end_headers()
            threading.Thread(target=self.server.shutdown).start()

        def log_message(self, *_: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


def learner(args: argparse.Namespace, url: str) -> None:
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, args.programs)
    from tiny import gpt2, sentence, tokenizer

    torch.set_num_threads(1)
    waits = []

    def judged(completions: list[str], **_: object) -> list[float]:
        begin = time.time_ns()
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(completions).encode())) as answer:
            rewards = json.loads(answer.read())
        waits.append((begin, time.time_ns()))
        return rewards

    class Ask(TrainerCallback):
        def on_step_end(self, _args, state, control, **_: object) -> None:
            if state.global_step == 6:
                trigger = [sys.executable, "-m", "perfscope", "trigger", args.folder, "--seconds", str(args.seconds)]
                subprocess.run(trigger, check=True, stdout=subprocess.DEVNULL)
            there = [*Path(args.folder).glob("**/rank-00000.capture-1.trace.json*")]
            control.should_training_stop = len({path.parent for path in there}) == 2

    config = GRPOConfig(
        output_dir=f"{args.log}/out", use_cpu=True, max_steps=500, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=16, logging_steps=1000, save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": sentence(number, 8)} for number in range(200)])
    trainer = GRPOTrainer(
        model=gpt2(), reward_funcs=judged, args=config, train_dataset=data, processing_class=tokenizer(),
        callbacks=[Ask()],
    )  # fmt: skip
    trainer.train()
    Path(args.log, "waits.json").write_text(json.dumps(waits))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--folder", default="")
    parser.add_argument("--programs", default="")
    parser.add_argument("--log", required=True)
    parser.add_argument("--is-judge", action="store_true")
    args = parser.parse_args()
    if args.is_judge:
        judge(args)
        return
    command = [sys.executable, __file__, "--is-judge", "--judge", str(args.judge), "--log", args.log]
    environment = {**os.environ, "PERFSCOPE_ROLE": "reward"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        url = f"http://127.0.0.1:{int(other.stdout.readline())}/"
        os.environ["PERFSCOPE_ROLE"] = "learner"
        try:
            learner(args, url)
        finally:
            urllib.request.urlopen(url).close()


if __name__ == "__main__":
    main()
