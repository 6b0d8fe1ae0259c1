"""What a run really did: clocks, ceilings, the machine it ran on."""
