"""Trains probes for your own concepts on your own model.

from probemon.lab.training import train

trained = train("demo", "mails.jsonl", "mails/")        # or a folder, a hub name, or a model with a tokenizer
"""

from probemon.lab.training.settings import TrainingSettings
from probemon.lab.training.trainer import Trained, train

__all__ = ["Trained", "TrainingSettings", "train"]
