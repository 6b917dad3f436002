# docker build -t steelyard --build-arg VERSION="$(git describe --tags --always --dirty)" .
# One static binary, and the certificates that https checks trust. It has no shell: exec checks need an image of your own.
FROM --platform=$BUILDPLATFORM golang:1.26.8 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETARCH
ARG VERSION=unknown
RUN GOARCH=$TARGETARCH make build VERSION="$VERSION"

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /src/steelyard /steelyard
ENTRYPOINT ["/steelyard"]
CMD ["run"]
