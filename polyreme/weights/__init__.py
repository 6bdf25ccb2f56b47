"""How a policy version is described, kept in shared memory and checked: numpy views, no copies, no torch."""
