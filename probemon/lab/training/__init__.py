"""Trains probes for concepts of your own on a model of your own; never needed to run them.

from probemon.lab.training import train

trained = train("demo", "mails.jsonl", "mails/")        # a folder, a hub name, "demo", or a model with a tokenizer
trained.pack, trained.quality
"""

from probemon.lab.training.settings import TrainingSettings
from probemon.lab.training.trainer import Trained, train

__all__ = ["Trained", "TrainingSettings", "train"]
