"""What a person looks at: summaries and tokens in a terminal, laws and scores of files, certificates of templates."""
