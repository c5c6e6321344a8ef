"""Policies as ONNX files, made in a process beside the training."""
