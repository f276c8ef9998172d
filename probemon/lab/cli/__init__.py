"""The lab's commands: corpora, training, calibration, other projects' probes."""

from probemon.cli.registry import Command

COMMANDS = (
    Command("analyze", "probemon.lab.cli.analyze:analyze", "Score every token of a corpus, and write it to a folder."),
    Command("report", "probemon.lab.cli.report:report", "Write an analysis as one HTML file."),
    Command("diff", "probemon.lab.cli.diff_analyses:diff", "List the concepts that differ between two analyses."),
    Command("train", "probemon.lab.cli.train:train", "Train probes for concepts of your own on MODEL."),
    Command("library", "probemon.lab.cli.library:library"),
    Command("states", "probemon.lab.cli.states:states", "Write hidden states of MODEL to files, with labels."),
    Command("calibrate", "probemon.lab.cli.calibrate:calibrate", "Set thresholds of PACK from documents."),
    Command("import", "probemon.lab.cli.importing:importing"),
)
