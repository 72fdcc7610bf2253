"""Small devices out of a large one: limits that the kernel itself keeps."""
