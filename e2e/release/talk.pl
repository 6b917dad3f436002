# talk.pl serve ADDRESS PORT: answers each line with the same line.
# talk.pl ask ADDRESS PORT FILE: sends a line every 50 ms over one connection until FILE exists, and fails if an answer
# takes longer than 5 s. Prints the number of answers.
use strict;
use IO::Socket::INET;
my ($do, $address, $port, $end) = @ARGV;
if ($do eq "serve") {
	my $l = IO::Socket::INET->new(LocalAddr => $address, LocalPort => $port, Listen => 9, ReuseAddr => 1)
		or die "listen: $@";
	while (my $c = $l->accept) {
		next if fork;
		$c->autoflush(1);
		print $c $_ while <$c>;
		exit 0;
	}
}
my $c = IO::Socket::INET->new(PeerAddr => $address, PeerPort => $port, Timeout => 10) or die "connect: $@";
$c->autoflush(1);
$SIG{ALRM} = sub { die "no answer in 5 s\n" };
for (my $n = 1; ; $n++) {
	alarm 5;
	print $c "$n\n" or die "send: $!";
	my $answer = <$c>;
	defined $answer && $answer eq "$n\n" or die "answer $n: $!";
	if (-e $end) { print "$n answers\n"; exit 0 }
	select undef, undef, undef, 0.05;
}
