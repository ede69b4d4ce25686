"""From operands to a plan: choosing a kernel, and the functions users call."""
