"""What a region begins from: a checkpoint on its disk, another region's, or the base that a member gives a newcomer."""
