"""What counts as a phone number, an identity number, a card, an e-mail address or a secret. Pure, any thread."""
