"""Data-parallel training: a leader (rank 0, the trainer) and followers that learn along, on torch.distributed."""
