"""Networks: those of the library, pretrained ones, and their parts."""
