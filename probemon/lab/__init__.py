"""The lab: from texts to analyses, packs and reports. The core does not import it."""
