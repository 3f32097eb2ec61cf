"""What trainers of others plug in: each part imports the trainer that it is for, and is imported by nothing here."""
