"""From an ONNX file to a flat network."""
