"""What runs trials: a process for each, forked from one that has imported torch, and the jobs a study gives them."""
