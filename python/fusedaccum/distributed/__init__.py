"""Windows of many processes: what ranks add up and agree on; DDP, FSDP2 and tensor parallelism."""
