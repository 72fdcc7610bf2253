"""Finding objects: boxes, anchors, the loss of YOLOv2, decoding, precision and pictures."""
