"""What several methods of this family share."""
