"""Translation of policies into ONNX files."""
