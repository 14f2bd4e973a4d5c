"""What regions did and held, and whether they changed anything: observers of regions."""
