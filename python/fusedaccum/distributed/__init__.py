"""Windows of many processes: what ranks add up, and what they agree on; DDP, FSDP2 and tensor parallelism."""
