"""Operations: a monitor in service. The core does not import it."""
