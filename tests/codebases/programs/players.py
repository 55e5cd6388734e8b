"""Reinforcement learning: stable-baselines3's PPO, whose environments are processes of their own."""

import gymnasium
from log import log
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import SubprocVecEnv


class Logged(PPO):
    def train(self) -> None:
        super().train()
        log(self.logger.name_to_value["train/loss"], 0)


def make():
    return gymnasium.make("CartPole-v1")


if __name__ == "__main__":
    world = SubprocVecEnv([make, make], start_method="fork")
    Logged("MlpPolicy", world, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu").learn(20 * 64)
    world.close()
